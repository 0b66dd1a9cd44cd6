// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package tenants

import (
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/sluice-net/sluice/kit/config"
	"github.com/sluice-net/sluice/model/shares"
)

// Config is the group "shares" of a process that divides limits of the cluster among tenants.
type Config struct {
	Tenants shares.Config `config:",inline"`

	Guarantees map[string]string `config:"guarantees" help:"part of each limit, in percent, that is reserved for a tenant"`
}

// Defaults returns the settings of a cluster without guarantees.
func Defaults() Config { return Config{Tenants: shares.Defaults()} }

// Settings converts the configuration for package shares. c must be valid.
func (c *Config) Settings() shares.Settings {
	s := c.Tenants.Settings()
	for name, percent := range c.Guarantees {
		if s.Guarantees == nil {
			s.Guarantees = make(map[string]int, len(c.Guarantees))
		}
		s.Guarantees[name], _ = strconv.Atoi(strings.TrimSuffix(percent, "%"))
	}
	return s
}

// Validate reports invalid guarantees. Package config calls it, and the Validate of Tenants.
func (c *Config) Validate() error {
	var p config.Problems
	numbers := true
	for _, name := range slices.Sorted(maps.Keys(c.Guarantees)) {
		if _, err := strconv.Atoi(strings.TrimSuffix(c.Guarantees[name], "%")); err != nil {
			p.Addf("guarantees", "%s: %q is not a percentage", name, c.Guarantees[name])
			numbers = false
		}
	}
	if numbers {
		if err := c.Settings().Validate(); err != nil {
			p.Addf("guarantees", "%s", strings.TrimPrefix(err.Error(), "shares.guarantees: "))
		}
	}
	return p.Err()
}
