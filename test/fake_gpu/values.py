def install(module): pass
