"""Parts from which several families of mechanisms are built: blocks, gates, queues."""
