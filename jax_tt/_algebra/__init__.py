"""Algebra of tensor-train tables: conversion from dense tables, sums, products, norms, rounding, least squares."""
