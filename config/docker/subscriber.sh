#!/bin/bash
# Run once by the image of PostgreSQL, in its new server: the table and the role of parapply.
set -euo pipefail
psql -v ON_ERROR_STOP=1 -U "$POSTGRES_USER" <<-'SQL'
	CREATE TABLE note (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, body text);
SQL
psql -U "$POSTGRES_USER" -v role=parapply_target -f /roles/subscriber.sql
psql -v ON_ERROR_STOP=1 -U "$POSTGRES_USER" -v password="$(cat /run/secrets/target_password)" \
	<<<"ALTER ROLE parapply_target PASSWORD :'password'"
