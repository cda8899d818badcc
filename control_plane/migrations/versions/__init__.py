"""One file a change of the tables, in the order their `down_revision` says."""
