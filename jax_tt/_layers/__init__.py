"""What the NNX and linen layers share: argument checks, fused variables, calls into the ops."""
