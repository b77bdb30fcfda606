"""The parts that decoders are put together from. Each works on rows, one independent of the other."""
