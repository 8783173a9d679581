"""The engine played through without a server, a task or a clock: a seed draws what happens, every step is checked."""
