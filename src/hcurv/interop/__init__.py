"""Other libraries: what they make as input for this one, and what is made here in their terms.

Each module needs the library that it is named after, and is imported by name, as in
``import hcurv.interop.laplace``. Nothing else in the package imports them.
"""
