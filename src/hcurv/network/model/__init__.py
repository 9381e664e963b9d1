"""Reading any model: what autograd recorded in a forward pass names all uses of parameters."""
