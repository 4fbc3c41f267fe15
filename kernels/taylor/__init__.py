"""Linear attention of Based: the second-order Taylor feature map and the other maps of its study."""
