"""Encoder outputs from engines that make them to engines that read them, whatever the engines are."""
