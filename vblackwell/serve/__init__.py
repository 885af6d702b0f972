"""Several models answer many requests on one device: the requests' rows share every pass over the weights."""
