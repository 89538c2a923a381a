"""eval-acceptance: acceptance length against real speedup."""
