"""How well plans are kept: ``python -m shardwise.audit`` plans configurations, then trains them and counts.

``cases``    what is planned and trained
``planning`` the plan of a case, by a dry run
``heap``     what the heap of the C library makes of the plan: the planned resident size
``training`` a rank that trains a case under torch's profiler
``trace``    what the allocator did, from the profiler's trace: the measured bytes
``verdict``  planned beside measured, and the errors

The measured bytes are the allocator's own events and the kernel's resident size, never the ledger of the engine.
"""
