"""The pages: one file each, which reads its workspace and shows it with the shell's components."""
