"""What tests share: samples, and programs that run in processes of their own."""
