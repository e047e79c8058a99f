"""The benchmarks of the papers, as suites of lm-eval's tasks."""
