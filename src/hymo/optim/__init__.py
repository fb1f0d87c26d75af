"""NorMuon, cautious AdamW and the partition between them; usable without the rest of the package."""
