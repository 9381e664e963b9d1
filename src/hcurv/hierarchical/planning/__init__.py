"""Choose what to store (global rank, leaf size, ordering) before anything is built."""
