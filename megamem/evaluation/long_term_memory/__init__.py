"""What models attend to in a continuous long-term memory: histograms, attended words, memory space."""
