"""Linear recurrences over tokens."""
