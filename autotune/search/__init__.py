"""What is searched, and how: problems, spaces, studies, and the loop over them."""
