"""RMS norm of all heads together and rotary embedding of queries or keys, in one pass."""
