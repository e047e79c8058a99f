"""What tokens and memory rows attend to by distance, and what LaMemo's memory rows are mixed of."""
