"""What kernels are written with: tile verbs, softmax, masks, shared tiles and the instructions below them."""
