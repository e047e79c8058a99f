"""Mutation tests: small slips put into the product's code one at a time, each of which a test near it must notice."""
