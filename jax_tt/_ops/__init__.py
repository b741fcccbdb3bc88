"""Operations on tables and arrays."""
