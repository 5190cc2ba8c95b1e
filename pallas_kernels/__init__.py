"""Raw Pallas kernels for Stein variational gradient descent: arrays in, arrays out.

One file a kernel family and backend, tile tables beside them. Nothing here knows about derivatives of
the whole operation, choice of implementation or bandwidth rules: that is ``jsvgd``'s business.
"""
