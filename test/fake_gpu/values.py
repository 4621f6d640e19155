def install(module):
    pass
