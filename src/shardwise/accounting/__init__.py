"""What a rank holds beside what was planned for it, and what to change when memory is short."""
