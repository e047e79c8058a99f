"""The way from text to token shards: corpora, tokenizers, the shard writer."""
