"""What selection costs and saves where drafts are verified, of which only some are right."""
