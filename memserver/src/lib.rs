//! The memory server: arena, allocator, serving loop.
