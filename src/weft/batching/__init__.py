"""Many calls, one batch: the rules (`queue`, `rendezvous`) and the two ways to wait for them (`threads`, `aio`)."""
