// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package shares

import (
	"errors"
	"fmt"
	"slices"
)

// Values of LabelConfig.Unlabelled.
const (
	Each     = "each"
	Together = "together"
)

// LabelConfig are the settings that name the tenant of a namespace. Every process that knows tenants has them in the
// group "shares", with the same values in the whole cluster.
type LabelConfig struct {
	TenantLabel string `config:"tenantLabel" help:"label of a Namespace that names its tenant"`
	Unlabelled  string `config:"unlabelled" enum:"each,together" help:"other namespaces: one tenant each, or together"`
}

// Config is LabelConfig with the namespaces of the tenant system, for a process that divides limits.
type Config struct {
	Labels LabelConfig `config:",inline"`

	SystemNamespaces []string `config:"systemNamespaces" help:"namespaces of the tenant system in addition to kube-system"`
}

// DefaultLabels returns the default settings of the tenant label.
func DefaultLabels() LabelConfig {
	return LabelConfig{TenantLabel: DefaultTenantLabel, Unlabelled: Each}
}

// Defaults returns the default settings.
func Defaults() Config {
	return Config{Labels: DefaultLabels(), SystemNamespaces: []string{"sluice-system"}}
}

// Settings converts the configuration, which must be valid.
func (c LabelConfig) Settings() Settings {
	return Settings{TenantLabel: c.TenantLabel, Together: c.Unlabelled == Together}
}

// Settings converts the configuration, which must be valid.
func (c Config) Settings() Settings {
	s := c.Labels.Settings()
	s.SystemNamespaces = slices.Clone(c.SystemNamespaces)
	return s
}

// Validate returns a SettingError for each invalid setting.
func (c LabelConfig) Validate() error {
	var errs []error
	if c.TenantLabel == "" {
		errs = append(errs, &SettingError{"tenantLabel", errors.New("must name a label")})
	}
	if c.Unlabelled != Each && c.Unlabelled != Together {
		errs = append(errs, &SettingError{"unlabelled", fmt.Errorf("%q is not %s or %s", c.Unlabelled, Each, Together)})
	}
	return errors.Join(errs...)
}

// SettingError is an error of one setting.
type SettingError struct {
	key string
	err error
}

// Error returns the key and the reason.
func (e *SettingError) Error() string { return e.key + ": " + e.err.Error() }

// Unwrap returns the reason.
func (e *SettingError) Unwrap() error { return e.err }

// Key returns the key of the setting, relative to the group.
func (e *SettingError) Key() string { return e.key }
