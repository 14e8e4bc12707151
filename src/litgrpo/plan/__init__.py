"""The command `plan`: does a recipe fit on a device, and what to change if it does not."""
