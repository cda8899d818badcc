"""What broke for people who ran such systems, as black-box tests: raw bytes in, raw bytes recorded at the upstream."""
