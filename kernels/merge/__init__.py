"""The monoid that merges partial attentions."""
