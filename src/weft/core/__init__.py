"""What every family of ops is built on: arrays of any library, ops and their gradients, scopes, tickets, the lock."""
