"""One object per array library, with the operations that the libraries spell differently: see `base.Library`."""
