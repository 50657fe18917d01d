"""What tests share: small trees, stores, models and processes; servers on loopback; oracles."""
