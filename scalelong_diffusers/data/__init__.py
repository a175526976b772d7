"""A data set becomes batches."""
