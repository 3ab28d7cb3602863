"""Course machinery. Which manager an engine for users gets: lesson 8's where it is there, lesson 5's without it."""

from mini_engine.kv.manager import KvCacheManager


def default_manager() -> type[KvCacheManager]:
    """PrefixCacheManager; KvCacheManager where lesson 8 is out of reach, as when an earlier lesson is proven alone."""
    try:
        from mini_engine.kv.prefix_manager import PrefixCacheManager
    except ModuleNotFoundError:
        return KvCacheManager
    return PrefixCacheManager
