"""Reading any model: what autograd recorded in a forward pass names every use of every parameter."""
