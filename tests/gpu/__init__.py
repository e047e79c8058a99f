"""What must hold on a CUDA device. The checks take the device as an argument; tests/unit runs them on the CPU."""
