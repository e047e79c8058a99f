"""What several families of mechanisms are built from."""
