"""overspill: Mixture-of-Experts models that are bigger than the GPUs' memory."""
