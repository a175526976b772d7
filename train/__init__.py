"""Training scripts, to be run or to be copied and changed."""
