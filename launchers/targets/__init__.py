"""The places where a job can run: one file a target, which registers a `Target` under the file's name."""
