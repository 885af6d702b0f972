"""What a run will take, by arithmetic: nothing here needs or touches a GPU."""
