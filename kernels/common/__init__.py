"""What all Triton kernels share: the online-softmax monoid, launch options, and where the kernels can run."""
