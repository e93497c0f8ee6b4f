"""What a reset writes: parameters, and what optimizers keep of them."""
