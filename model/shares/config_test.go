// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package shares

import (
	"errors"
	"slices"
	"testing"
)

func TestInvalidLabelSettingsAreNamed(t *testing.T) {
	for want, c := range map[string]LabelConfig{
		"":            DefaultLabels(),
		"tenantLabel": {Unlabelled: Together},
		"unlabelled":  {TenantLabel: "team", Unlabelled: "one"},
	} {
		got := ""
		if e, ok := errors.AsType[*SettingError](c.Validate()); ok {
			got = e.Key()
		}
		if got != want {
			t.Errorf("%+v: the error is about %q, want %q", c, got, want)
		}
	}
}

func TestSettingsOfAConfiguration(t *testing.T) {
	s := Config{Labels: LabelConfig{TenantLabel: "team", Unlabelled: Together}, SystemNamespaces: []string{"x"}}.Settings()
	if s.Label() != "team" || !s.Together || !slices.Equal(s.SystemNamespaces, []string{"x"}) {
		t.Errorf("the settings are %+v", s)
	}
	if s := Defaults().Settings(); s.TenantOf("sluice-system", "") != System || s.TenantOf("a", "") != Namespace("a") {
		t.Errorf("the default settings are %+v", s)
	}
}
