"""What the command line does: advise, bench, doctor."""
